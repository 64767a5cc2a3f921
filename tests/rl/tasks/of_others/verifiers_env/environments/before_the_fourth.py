"""An environment as packages before 0.4 have them."""


def load_environment():
    return None
