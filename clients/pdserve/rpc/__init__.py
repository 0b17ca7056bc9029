"""What both ends of every call share: errors, their wire form, channel options."""
