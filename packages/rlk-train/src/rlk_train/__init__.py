"""rlk-train."""
