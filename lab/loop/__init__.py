"""The lab in a training loop of the user's own: `import lab`."""
