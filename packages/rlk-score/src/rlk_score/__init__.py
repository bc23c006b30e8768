"""rlk-score."""
