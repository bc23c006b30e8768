"""Ways for the bytes of an update to reach a consumer."""
