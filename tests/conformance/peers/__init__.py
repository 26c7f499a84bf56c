"""The conformance kit on the replay of other projects, which README.md beside this file tells of."""
