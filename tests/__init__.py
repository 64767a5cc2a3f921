"""The tests, as a package: helpers are imported from it (`from tests.trainer.helpers import ...`)."""
