"""The families of decoders: functions from the fields of a config to a specification."""
