"""The pytest plug-in of the gold path."""
