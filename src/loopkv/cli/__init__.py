"""The command line: one module per verb, each a thin shell over one library function."""
