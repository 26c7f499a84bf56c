"""The only room that imports a foreign framework. Each adapter is imported by name, on request."""
