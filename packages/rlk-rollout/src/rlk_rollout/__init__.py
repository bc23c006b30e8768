"""rlk-rollout."""
