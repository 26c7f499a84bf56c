"""Home placement: which expert-parallel rank each expert lives on, and how experts move there between two steps."""
