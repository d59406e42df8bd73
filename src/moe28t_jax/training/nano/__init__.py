"""What the small trained model is made from: its corpus and its vocabulary."""
