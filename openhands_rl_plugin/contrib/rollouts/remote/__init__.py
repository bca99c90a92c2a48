"""Workers in Ray actors on any machine: queue and store stay with the service, and all calls of them are messages."""
