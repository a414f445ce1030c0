"""Text for people: quantities, names grouped by weight and layer, steps of a scale."""
