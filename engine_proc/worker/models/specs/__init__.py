"""What a decoder is, as data, and the fields of the configs that say it."""
