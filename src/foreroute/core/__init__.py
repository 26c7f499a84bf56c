"""The heart, on torch alone: what replay needs whatever holds the routes."""
