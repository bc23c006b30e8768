"""rlk-weightsync."""
