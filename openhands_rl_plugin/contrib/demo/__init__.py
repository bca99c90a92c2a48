"""The whole loop as one command: a small pretrained model learns to shop, inside OpenHands, on one machine."""
