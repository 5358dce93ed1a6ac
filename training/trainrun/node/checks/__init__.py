"""What is checked of a node before its peers wait for it: one subject a module, each a function that returns what was found
and raises `StepFailed` with what was seen, what was expected and what to do."""
