"""Classify one sentence with a model saved by a recipe.

python scripts/classify.py outputs/bert "Return a Future for the running task."
"""

import argparse

from transformers import AutoModelForSequenceClassification, AutoTokenizer, logging, pipeline


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="where the model was saved")
    parser.add_argument("sentence", help="what to classify")
    args = parser.parse_args()
    logging.disable_progress_bar()
    classifier = pipeline(
        "text-classification",
        model=AutoModelForSequenceClassification.from_pretrained(args.folder),
        tokenizer=AutoTokenizer.from_pretrained(args.folder),
    )
    [answer] = classifier(args.sentence)
    print(f"{args.sentence!r}\nlabel: {answer['label']}, probability: {answer['score']:.3f}")


if __name__ == "__main__":
    main()
