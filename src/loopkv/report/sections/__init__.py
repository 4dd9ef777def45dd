"""One module per group of Records: each turns the ones it knows into a section, or None where there are none."""
