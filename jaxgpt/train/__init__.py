"""Loss, optimizer and the train step: pure functions of state and batch."""
