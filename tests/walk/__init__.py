"""The protocol machines walked over every joint state that a hostile world can bring them to."""
