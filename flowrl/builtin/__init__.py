"""What flowrl brings along so that the first run needs nothing: a tiny model and a task with a grader."""
