"""One algorithm each, a short driver; their settings hold only what differs from the defaults."""
