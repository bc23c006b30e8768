"""The loop that composes the five packages, and its command line."""
