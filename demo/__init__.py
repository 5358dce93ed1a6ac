"""`make demo`: from a bare machine to a trained model, through an emulated AWS, with a node killed on the way."""
