"""Commands that say how good episodes were: ``score`` by a reward, a verifier or one verdict, ``label`` by a person."""
