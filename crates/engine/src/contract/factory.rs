//! Factories: opening the engines of a machine by their names.
//!
//! A factory finds the devices of one kind, reads its own settings from the environment, and opens
//! engines. The copy core walks the [list of all factories](crate::factories) and knows no engine by
//! its type, except the processor's.

use std::fmt::{self, Debug};
use std::sync::Arc;

use memferry_memory::pin_cache::PinCacheLimits;

use super::{Engine, OpenError};

/// The selection of the devices of one kind.
///
/// ```
/// use memferry::{EngineSelection, Ferry};
///
/// assert_eq!(EngineSelection::device(0), EngineSelection::Devices(vec!["0".into()]));
/// let ferry = Ferry::builder().ioat(EngineSelection::Auto).build()?;
/// # Ok::<_, Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum EngineSelection {
    /// No device is used, and no driver is loaded.
    #[default]
    Off,
    /// The devices that are available are used, if there are any: the first GPU, the first network
    /// card, all I/OAT devices, or all DSA work queues that the process may open and that are free
    /// (without any, all DSA devices that are bound to `vfio-pci`). Other PCI devices of kernel
    /// drivers are not touched.
    Auto,
    /// These devices are used, and opening fails without them. GPUs are named by their number, PCI
    /// devices by their address, such as `0000:00:04.0`, and work queues of DSA devices by their
    /// name, such as `wq0.0`.
    Devices(Vec<String>),
}

impl EngineSelection {
    /// Selects one device, by its number, its PCI address or the name of its work queue.
    pub fn device(name: impl ToString) -> Self {
        Self::Devices(vec![name.to_string()])
    }

    /// Reads the text of an environment variable or an argument: `off`, `auto`, or devices with commas
    /// between them.
    pub fn parse(text: &str) -> Self {
        match text {
            "off" => Self::Off,
            "auto" => Self::Auto,
            devices => Self::Devices(devices.split(',').map(|name| name.trim().into()).collect()),
        }
    }
}

impl fmt::Display for EngineSelection {
    /// Writes the text that an environment variable would have.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Off => f.write_str("off"),
            Self::Auto => f.write_str("auto"),
            Self::Devices(names) => f.write_str(&names.join(",")),
        }
    }
}

/// An engine and the number of channels to open on it.
#[derive(Debug, Clone)]
pub struct EngineChoice {
    /// The engine.
    pub engine: Arc<dyn Engine>,
    /// The number of channels.
    pub channels: usize,
}

/// Options of opening engines. A factory ignores options that do not apply to it.
#[derive(Debug, Clone, Default)]
pub struct OpenOptions {
    /// The limits of the memory that an engine keeps registered; `None` for the engine's own.
    pub pin_limits: Option<PinCacheLimits>,
    /// Whether no other library of this process uses the device; `None` as the environment says.
    pub is_sole_user: Option<bool>,
    /// The selection came from the environment; errors name the variable.
    pub by_environment: bool,
}

/// Opens the engines of one kind.
pub trait EngineFactory: Sync + Debug {
    /// The name of its engines, and of the setting: `cuda`, `dsa`, `ioat` or `nic`.
    fn name(&self) -> &'static str;

    /// The environment variable with the default selection.
    fn variable(&self) -> &'static str;

    /// The valid selections, for errors.
    fn expected(&self) -> &'static str;

    /// Reads a selection from the text of the environment variable; `None` if it is not valid.
    fn parse(&self, text: &str) -> Option<EngineSelection>;

    /// Whether a selection of the program is valid.
    fn accepts(&self, selection: &EngineSelection) -> bool;

    /// Opens the selected engines. Called for [`EngineSelection::Off`] too, so that invalid settings
    /// of the factory are always errors.
    fn open(
        &self,
        selection: &EngineSelection,
        options: &OpenOptions,
    ) -> Result<Vec<EngineChoice>, OpenError>;
}

/// Adds to an error which setting of the environment selected the device.
pub(crate) fn blame_setting(error: OpenError, setting: &str) -> OpenError {
    match error {
        OpenError::System { engine, reason } => {
            let hint = "unset it, or set it to auto";
            let reason = format!("{reason} ({setting} asks for it: {hint})");
            OpenError::System { engine, reason }
        }
        error => error,
    }
}
