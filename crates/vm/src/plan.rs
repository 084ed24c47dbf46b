//! What the host wants done, in a file that the guest finds in its memory when it starts.

use serde::{Deserialize, Serialize};

/// Where the guest finds the plan. A first process that does not find it is in no machine of ours.
pub(crate) const PLAN: &str = "/etc/memferry-vm.json";

/// What the guest is to do.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Plan {
    /// Whether there is a card to hand over.
    pub(crate) card: bool,
    /// Kernel modules to load, in order.
    pub(crate) modules: Vec<String>,
    /// Names and values that every program is given.
    pub(crate) environment: Vec<(String, String)>,
    /// Programs to run, one after the other.
    pub(crate) programs: Vec<Command>,
}

/// A program of the guest, and what it is told.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Command {
    pub(crate) path: String,
    pub(crate) arguments: Vec<String>,
}

impl Plan {
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
        let plan = Plan {
            card: true,
            modules: vec!["/modules/0-vfio.ko".into()],
            environment: vec![("NAME".into(), "a value = \"quoted\"\nin two lines".into())],
            programs: vec![Command {
                path: "/programs/0-a b".into(),
                arguments: vec![String::new(), "two words".into(), "ünï\u{0}code".into()],
            }],
        };
        assert_eq!(Plan::decode(&plan.encode()).unwrap(), plan);
    }
}
