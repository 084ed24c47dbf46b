//! The topology of the cores: which share a processor core, caches and a node of memory.

use std::fs;
use std::path::Path;

use crate::fork::ForkSafe;

/// How far a core is from another, nearest first. The sibling of a core is last but for the core
/// itself: two threads of one core share its execution units and its first caches, so a copy on one may
/// slow the other down.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Distance {
    /// Another core with a second-level cache in common.
    SharedL2,
    /// A last-level cache in common.
    SharedL3,
    /// The same node of memory.
    SameNode,
    /// Another node of memory, or unknown.
    OtherNode,
    /// The other hardware thread of the same core.
    Sibling,
    /// The same core.
    Same,
}

/// A core, the other hardware thread of it, and the nearest core besides.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SiblingPair {
    /// The core.
    pub core: usize,
    /// The other hardware thread of the same core.
    pub sibling: usize,
    /// The nearest hardware thread of another core, if there is any.
    pub neighbour: Option<usize>,
}

/// What one core shares with others: each field names a group of cores by its lowest one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
struct CoreGroups {
    core: Option<usize>,
    l2: Option<usize>,
    l3: Option<usize>,
    node: Option<usize>,
}

/// The topology of all cores.
#[derive(Debug, Default)]
pub struct Topology {
    cores: Vec<CoreGroups>,
    nodes: usize,
}

impl Topology {
    /// The topology of this machine, read once.
    pub fn of_machine() -> &'static Self {
        static TOPOLOGY: ForkSafe<Topology> = ForkSafe::new();
        TOPOLOGY.get_or_init(|| Self::read(Path::new("/sys/devices/system")))
    }

    /// Reads the topology from the folders of the kernel below `system`, usually
    /// `/sys/devices/system`. What is missing there is unknown.
    pub fn read(system: &Path) -> Self {
        let mut cores = Vec::new();
        while let Some(groups) = CoreGroups::read(&system.join(format!("cpu/cpu{}", cores.len()))) {
            cores.push(groups);
        }
        let mut nodes = 0;
        while let Some(list) = read_list(&system.join(format!("node/node{nodes}/cpulist"))) {
            for core in list {
                if let Some(groups) = cores.get_mut(core) {
                    groups.node = Some(nodes);
                }
            }
            nodes += 1;
        }
        Self { cores, nodes }
    }

    /// Whether any two cores are as far from each other as any other two.
    pub fn is_uniform(&self) -> bool {
        let others = || (1..self.cores.len()).map(|core| self.distance(0, core));
        // Groups are of equal size on every known machine, so the distances from one core tell.
        others().all(|distance| Some(distance) == others().next())
    }

    /// The number of nodes of memory; 0 if unknown.
    pub fn nodes(&self) -> usize {
        self.nodes
    }

    /// The node of memory of a core, if it is known.
    pub fn node_of(&self, core: usize) -> Option<usize> {
        self.cores.get(core)?.node
    }

    /// A core and its sibling, with the nearest of the other cores; `None` if `allowed` has no sibling of
    /// it.
    pub fn sibling_pair(&self, core: usize, allowed: &[usize]) -> Option<SiblingPair> {
        let distance = |other: &usize| self.distance(core, *other);
        let is_sibling = |other: &usize| distance(other) == Distance::Sibling;
        let sibling = allowed.iter().copied().find(is_sibling)?;
        let is_other = |other: &usize| distance(other) < Distance::Sibling;
        let neighbour = allowed.iter().copied().filter(is_other).min_by_key(distance);
        Some(SiblingPair { core, sibling, neighbour })
    }

    /// The distance between two cores.
    pub fn distance(&self, from: usize, to: usize) -> Distance {
        if from == to {
            return Distance::Same;
        }
        let (Some(from), Some(to)) = (self.cores.get(from), self.cores.get(to)) else {
            return Distance::OtherNode;
        };
        let shared = |group: fn(&CoreGroups) -> Option<usize>| {
            group(from).is_some() && group(from) == group(to)
        };
        if shared(|groups| groups.core) {
            Distance::Sibling
        } else if shared(|groups| groups.l2) {
            Distance::SharedL2
        } else if shared(|groups| groups.l3) {
            Distance::SharedL3
        } else if shared(|groups| groups.node) {
            Distance::SameNode
        } else {
            Distance::OtherNode
        }
    }
}

/// The nodes of memory that the pages at some addresses are on, by one system call. `None` for a page that
/// is not there: nothing is mapped, or it was never written. Any address is allowed, and no page is
/// allocated by this. All are `None` if the kernel does not tell.
pub fn memory_nodes<const N: usize>(addresses: [u64; N]) -> [Option<usize>; N] {
    const THIS_PROCESS: libc::c_int = 0;
    const NO_FLAGS: libc::c_int = 0;
    let pages = addresses.map(|address| address as usize as *const libc::c_void);
    let mut status: [libc::c_int; N] = [-libc::ENOENT; N];
    // SAFETY: the kernel reads `N` addresses and writes `N` numbers; without a list of nodes it moves
    // nothing, and only looks up the pages.
    let outcome = unsafe {
        libc::syscall(
            libc::SYS_move_pages,
            THIS_PROCESS,
            N as libc::c_ulong,
            pages.as_ptr(),
            std::ptr::null::<libc::c_int>(),
            status.as_mut_ptr(),
            NO_FLAGS,
        )
    };
    // A page without a node has a negative number.
    status.map(|node| usize::try_from(node).ok().filter(|_| outcome == 0))
}

impl CoreGroups {
    /// Reads the groups of a core; `None` if there is no such core.
    fn read(folder: &Path) -> Option<Self> {
        let siblings = read_list(&folder.join("topology/thread_siblings_list"));
        let mut groups = Self { core: lowest(siblings), ..Self::default() };
        groups.core?;
        for index in 0..8 {
            let cache = folder.join(format!("cache/index{index}"));
            let read = |name: &str| fs::read_to_string(cache.join(name)).ok();
            let Some(level) = read("level") else { break };
            let shared = lowest(read_list(&cache.join("shared_cpu_list")));
            match level.trim() {
                "2" => groups.l2 = shared,
                "3" => groups.l3 = shared,
                _ => {}
            }
        }
        Some(groups)
    }
}

fn lowest(cores: Option<Vec<usize>>) -> Option<usize> {
    cores?.into_iter().min()
}

/// Reads a list of numbers such as `0-3,8`.
fn read_list(path: &Path) -> Option<Vec<usize>> {
    let text = fs::read_to_string(path).ok()?;
    let mut numbers = Vec::new();
    for range in text.trim().split(',').filter(|range| !range.is_empty()) {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        numbers.extend(first.parse::<usize>().ok()?..=last.parse::<usize>().ok()?);
    }
    Some(numbers)
}

#[cfg(all(test, not(loom)))]
mod tests {
    use memferry_testing::message::filter;

    use super::*;
    use crate::pages::{Pages, page_bytes};
    use crate::residency::is_resident;

    /// Two nodes of two cores with two threads each: 0 and 4 are threads of one core, and so on. Each
    /// node has an L3, and the cores of node 1 share an L2.
    fn write_machine(system: &Path) {
        let write = |path: String, text: &str| {
            let path = system.join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        for core in 0..8usize {
            let folder = format!("cpu/cpu{core}");
            let siblings = format!("{},{}\n", core % 4, core % 4 + 4);
            write(format!("{folder}/topology/thread_siblings_list"), &siblings);
            let node = if core % 4 < 2 { "0-1,4-5\n" } else { "2-3,6-7\n" };
            let l2 = if core % 4 < 2 { siblings.as_str() } else { node };
            for (index, level, shared) in
                [(0, "1", siblings.as_str()), (1, "2", l2), (2, "3", node)]
            {
                write(format!("{folder}/cache/index{index}/level"), level);
                write(format!("{folder}/cache/index{index}/shared_cpu_list"), shared);
            }
        }
        write("node/node0/cpulist".into(), "0-1,4-5\n");
        write("node/node1/cpulist".into(), "2-3,6-7\n");
    }

    #[test]
    fn cores_are_near_that_share_caches_and_siblings_are_far() {
        let folder = tempfile::tempdir().unwrap();
        write_machine(folder.path());
        let topology = Topology::read(folder.path());
        assert_eq!(topology.nodes(), 2);
        assert_eq!([1, 6, 8].map(|core| topology.node_of(core)), [Some(0), Some(1), None]);
        for (from, to, distance) in [
            (0, 0, Distance::Same),
            (0, 4, Distance::Sibling),
            (0, 1, Distance::SharedL3),
            (0, 5, Distance::SharedL3),
            (2, 3, Distance::SharedL2),
            (0, 2, Distance::OtherNode),
            (0, 99, Distance::OtherNode),
        ] {
            assert_eq!(topology.distance(from, to), distance, "{from} and {to}");
            assert_eq!(topology.distance(to, from), distance, "{to} and {from}");
        }
        let mut from_two = [3, 4, 6, 2, 0];
        from_two.sort_by_key(|&core| topology.distance(2, core));
        assert_eq!(from_two, [3, 4, 0, 6, 2]);
        assert!(!topology.is_uniform());
    }

    #[test]
    fn a_core_has_a_sibling_and_a_nearest_neighbour_among_the_allowed_cores() {
        let folder = tempfile::tempdir().unwrap();
        write_machine(folder.path());
        let topology = Topology::read(folder.path());
        let pair = |core, sibling, neighbour| Some(SiblingPair { core, sibling, neighbour });
        let all: Vec<usize> = (0..8).collect();
        assert_eq!(topology.sibling_pair(0, &all), pair(0, 4, Some(1)));
        assert_eq!(topology.sibling_pair(6, &all), pair(6, 2, Some(3)));
        assert_eq!(topology.sibling_pair(0, &[0, 2, 4, 5]), pair(0, 4, Some(5)));
        assert_eq!(topology.sibling_pair(0, &[0, 4]), pair(0, 4, None));
        assert_eq!(topology.sibling_pair(0, &[0, 1, 2, 3]), None);
        assert_eq!(topology.sibling_pair(9, &all), None);
    }

    #[test]
    fn a_machine_of_one_kind_of_neighbours_is_uniform() {
        let folder = tempfile::tempdir().unwrap();
        let write = |path: String, text: &str| {
            let path = folder.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        for core in 0..4 {
            write(format!("cpu/cpu{core}/topology/thread_siblings_list"), &format!("{core}\n"));
            write(format!("cpu/cpu{core}/cache/index0/level"), "3\n");
            write(format!("cpu/cpu{core}/cache/index0/shared_cpu_list"), "0-3\n");
            assert!(Topology::read(folder.path()).is_uniform());
        }
        write("cpu/cpu0/topology/thread_siblings_list".into(), "0,2\n");
        write("cpu/cpu2/topology/thread_siblings_list".into(), "0,2\n");
        assert!(!Topology::read(folder.path()).is_uniform());
    }

    #[test]
    fn a_machine_that_tells_nothing_has_no_near_cores() {
        let folder = tempfile::tempdir().unwrap();
        let topology = Topology::read(folder.path());
        assert_eq!((topology.nodes(), topology.distance(0, 1)), (0, Distance::OtherNode));
    }

    #[test]
    fn memory_is_on_a_node_or_the_kernel_does_not_tell() {
        let page = vec![1u8; 4096];
        let nodes = Topology::of_machine().nodes();
        let [here, nowhere, none] = memory_nodes([page.as_ptr() as u64, 8, 0]);
        assert!(here.is_none_or(|node| node < nodes.max(1)));
        assert_eq!((nowhere, none), (None, None), "nothing is mapped there");
    }

    #[test]
    fn memory_that_was_never_written_is_on_no_node_and_stays_absent() {
        let mut pages = Pages::new(3 * page_bytes()).unwrap();
        let start = pages.as_mut_slice().as_mut_ptr();
        let at = |page: usize| start as u64 + (page * page_bytes()) as u64;
        let is_present = || [0, 1, 2].map(|page| is_resident(at(page) as usize));
        // SAFETY: both bytes lie in the pages.
        unsafe {
            start.write_volatile(1);
            start.add(page_bytes()).read_volatile();
        }
        let before = is_present();
        let [written, read, untouched] = memory_nodes([at(0), at(1), at(2)]);
        assert!(written.is_none_or(|node| node < Topology::of_machine().nodes().max(1)));
        assert_eq!(
            read, None,
            "it is the page of zeros, which all memory that is only read shares"
        );
        assert_eq!(untouched, None);
        assert_eq!(is_present(), before, "asking allocates nothing");
        assert!(!before[2]);
    }

    #[test]
    fn no_node_is_known_where_a_filter_refuses_the_question() {
        // The filter is of one thread.
        std::thread::spawn(|| {
            let page = vec![1u8; 4096];
            filter::refuse(&[libc::SYS_move_pages], libc::EPERM);
            assert_eq!(memory_nodes([page.as_ptr() as u64; 2]), [None; 2]);
        })
        .join()
        .unwrap();
    }

    #[test]
    fn this_machine_has_a_topology() {
        let topology = Topology::of_machine();
        assert_eq!(topology.distance(0, 0), Distance::Same);
        assert!(!topology.cores.is_empty(), "a core tells its siblings");
    }
}
