"""The device laboratory: where a step's time, operations and memory go inside one device."""
