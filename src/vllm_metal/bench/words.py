"""The words that prompts are made of: short and common, so that nearly each is one token to any tokenizer."""

from __future__ import annotations

WORDS = tuple(
    """
    able about above across act add after again age air all almost along also always among animal answer any
    apple area arm art ask baby back bad ball bank base bear beat become bed before begin behind best better
    between big bird black blood blue board boat body bone book both box boy bring brown build burn busy buy
    call came car care carry case cat catch center chair chance change check child choose circle city class
    clear climb clock close cloud coast cold color come common cook cool copy corn corner cost count country
    course cover cross cry cut dance dark day deal dear deep desert door double down draw dream dress drink
    drive drop dry during each early earth east easy eat edge egg eight else end enemy energy engine enough
    enter equal even evening event ever every exact example eye face fact fair fall family far farm fast
    father favor fear feed feel field fight figure fill find fine finger finish fire first fish fit five
    floor flow flower follow food foot force forest form forward four free fresh friend front fruit full fun
    game garden gather gave general gentle get girl give glad glass gold good grand grass gray great green
    ground group grow guess guide hair half hand happy hard hat hear heart heat heavy help high hill history
    hold hole home hope horse hot hour house human hundred hunt ice idea inch iron island job join joy jump
    just keep
    """.split()  # noqa: SIM905
)
