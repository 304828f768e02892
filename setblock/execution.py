"""Run generated code in a limited subprocess."""
import json, subprocess, sys
def calls_agree(code, name, cases):
    return False
