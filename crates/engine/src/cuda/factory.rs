//! Opening the engine of a GPU.

use std::sync::Arc;

use memferry_sys::affinity;
use memferry_sys::settings::{self, switch};

use super::{CudaConfig, CudaEngine};
use crate::contract::factory::blame_setting;
use crate::contract::{EngineChoice, EngineFactory, EngineSelection, OpenError, OpenOptions};

const VARIABLE: &str = "MEMFERRY_GPU";
const SOLE_USER: &str = "MEMFERRY_CUDA_SOLE_USER";

/// Maximum number of channels: as many as keep the GPU busy with copies through staging buffers.
const MAX_CHANNELS: usize = 10;

/// The factory of GPU engines.
#[derive(Debug)]
pub(crate) struct CudaFactory;

impl EngineFactory for CudaFactory {
    fn name(&self) -> &'static str {
        "cuda"
    }

    fn variable(&self) -> &'static str {
        VARIABLE
    }

    fn expected(&self) -> &'static str {
        "off, auto or the number of a GPU"
    }

    fn parse(&self, text: &str) -> Option<EngineSelection> {
        Some(EngineSelection::parse(text)).filter(|selection| self.accepts(selection))
    }

    fn accepts(&self, selection: &EngineSelection) -> bool {
        match selection {
            EngineSelection::Devices(devices) => ordinal_of(devices).is_some(),
            EngineSelection::Off | EngineSelection::Auto => true,
        }
    }

    fn open(
        &self,
        selection: &EngineSelection,
        options: &OpenOptions,
    ) -> Result<Vec<EngineChoice>, OpenError> {
        let mut config = CudaConfig::default();
        config.limits = options.pin_limits.unwrap_or(config.limits);
        config.is_sole_user = match options.is_sole_user {
            Some(is_sole_user) => is_sole_user,
            None => sole_user_setting()?,
        };
        match selection {
            EngineSelection::Off => Ok(Vec::new()),
            EngineSelection::Auto => match open(config) {
                Ok(choice) => Ok(vec![choice]),
                Err(error) => {
                    tracing::info!(%error, "no GPU is used");
                    Ok(Vec::new())
                }
            },
            EngineSelection::Devices(devices) => {
                config.ordinal = ordinal_of(devices).unwrap_or(usize::MAX);
                open(config).map(|choice| vec![choice]).map_err(|error| {
                    if options.by_environment {
                        blame_setting(error, &format!("{VARIABLE}={}", config.ordinal))
                    } else {
                        error
                    }
                })
            }
        }
    }
}

/// The number of the only named device.
fn ordinal_of(devices: &[String]) -> Option<usize> {
    let [only] = devices else { return None };
    only.parse().ok()
}

fn sole_user_setting() -> Result<bool, OpenError> {
    let set = settings::read_variable(SOLE_USER, switch::parse);
    let set = set.map_err(|value| {
        let (name, expected) = (SOLE_USER, switch::EXPECTED);
        OpenError::Environment { name, value, expected }
    })?;
    Ok(set.unwrap_or(false))
}

fn open(config: CudaConfig) -> Result<EngineChoice, OpenError> {
    let engine = Arc::new(open_engine(config)?);
    let channels = (affinity::allowed_cores().len() * 5 / 8).clamp(1, MAX_CHANNELS);
    Ok(EngineChoice { engine, channels })
}

#[cfg(feature = "cuda")]
fn open_engine(config: CudaConfig) -> Result<CudaEngine, OpenError> {
    CudaEngine::open(config)
}

#[cfg(not(feature = "cuda"))]
fn open_engine(_config: CudaConfig) -> Result<CudaEngine, OpenError> {
    let reason = "this program was built without it: build with the feature `cuda`".into();
    Err(OpenError::System { engine: "cuda".into(), reason })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gpu_is_named_by_one_number() {
        let parse = |text| CudaFactory.parse(text);
        assert_eq!(parse("off"), Some(EngineSelection::Off));
        assert_eq!(parse("auto"), Some(EngineSelection::Auto));
        assert_eq!(parse("1"), Some(EngineSelection::device(1)));
        for wrong in ["", "GPU", "-1", "0,1", "1,", "1 2"] {
            assert_eq!(parse(wrong), None, "{wrong}");
        }
    }
}
