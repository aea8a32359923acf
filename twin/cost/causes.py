"""What the time of a block goes to, in the order of reports. Plain integers: they are compared for
every slot.
"""

STREAMING, HAND_OFF, COLLECTIVE, CONSUMER, LAUNCH, ATTENTION, SAMPLING, OTHER, ROUTING = range(9)
CAUSES = (
    "streaming",
    "hand_off",
    "collective",
    "consumer",
    "launch",
    "attention",
    "sampling",
    "other",
    "routing",
)
