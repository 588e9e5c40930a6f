"""The paper's propositions and appendix B as code."""
