"""Why a run does not go on: which rank is behind, and what its stacks say."""
