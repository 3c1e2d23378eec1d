"""Files of records that are found by digest."""
