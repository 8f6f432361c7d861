"""The kill-and-verify cycle: plan, ladder, clearance, health, verdict, receipt."""
