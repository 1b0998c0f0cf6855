"""What is right, and how far from it rounding may lead. Knows cases; never learns a backend's name."""
