"""What the studio's API answers, one file a resource. The JSON of each is described in ``docs/studio-api.md``."""
