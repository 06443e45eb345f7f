"""Users' own maps on gradients and updates: what type a value has there, and how a map is checked and run."""
