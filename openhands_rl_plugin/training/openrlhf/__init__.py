"""Our rollouts under OpenRLHF's trainer. Start with ``agent``, the file that OpenRLHF loads."""
