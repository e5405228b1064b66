import hydra
from omegaconf import DictConfig

import lab


@hydra.main(config_path="pkg://lab.conf", config_name="train", version_base="1.3")
def main(config: DictConfig) -> float | None:
    return lab.run(config).final["loss"]


if __name__ == "__main__":
    main()
