"""What becomes of a rank that holds slices of leaves along the data axes: its optimizer, its parameters, its gathers."""
