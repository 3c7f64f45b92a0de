"""Is N ranks the same training as one? Two recorded runs, compared by name, update and phase."""
