"""Scripts: each parses its options, calls the package and saves the result."""
