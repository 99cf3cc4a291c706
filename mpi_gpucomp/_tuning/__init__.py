"""The plans of `codec="auto"`: measurement, model, exploration."""
