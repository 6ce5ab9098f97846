"""Moving weights between layouts."""
