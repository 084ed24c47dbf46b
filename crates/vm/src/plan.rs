//! The plan of the host for the guest: a file in the initramfs.

use serde::{Deserialize, Serialize};

/// The path of the plan. A first process that does not find it does not run in a machine of this
/// library.
pub(crate) const PLAN: &str = "/etc/memferry-vm.json";

/// The work of the guest.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct GuestPlan {
    /// Whether the guest binds a network card to vfio-pci.
    pub(crate) card: bool,
    /// The kernel modules to load, in order.
    pub(crate) modules: Vec<String>,
    /// The environment variables of every program.
    pub(crate) environment: Vec<(String, String)>,
    /// The programs to run, one after the other.
    pub(crate) programs: Vec<GuestCommand>,
}

/// A program of the guest with its arguments.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct GuestCommand {
    pub(crate) path: String,
    pub(crate) arguments: Vec<String>,
}

impl GuestPlan {
    pub(crate) fn encode(&self) -> Vec<u8> {
        serde_json::to_vec(self).expect("strings and lists can be written")
    }

    pub(crate) fn decode(bytes: &[u8]) -> Result<Self, serde_json::Error> {
        serde_json::from_slice(bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_plan_is_read_as_it_was_written() {
        let plan = GuestPlan {
            card: true,
            modules: vec!["/modules/0-vfio.ko".into()],
            environment: vec![("NAME".into(), "a value = \"quoted\"\nin two lines".into())],
            programs: vec![GuestCommand {
                path: "/programs/0-a b".into(),
                arguments: vec![String::new(), "two words".into(), "ünï\u{0}code".into()],
            }],
        };
        assert_eq!(GuestPlan::decode(&plan.encode()).unwrap(), plan);
    }
}
