"""Tasks of other packages, each an `EnvironmentTask` or `SingleTurnTask`: `textarena:`, `verifiers:`, `openenv:`."""
