//! Whether a job runs on this host alone. Its ranks then open no socket for other hosts.

use std::ffi::OsString;
use std::path::Path;

/// The variable by which ranks open no socket for other hosts.
pub(super) const REMOTE: &str = "MEMFERRY_REMOTE";

/// Options of launchers that name hosts, or a file with them or with further options.
const HOST_OPTIONS: [&str; 22] = [
    "H",
    "host",
    "hosts",
    "hostfile",
    "machinefile",
    "default-hostfile",
    "add-host",
    "add-hostfile",
    "f",
    "configfile",
    "app",
    "rankfile",
    "rf",
    "rmk",
    "launcher",
    "bootstrap",
    "tune",
    "am",
    "server-port",
    "dvm",
    "dvm-uri",
    "hnp",
];

/// Variables with which a launcher finds hosts by itself.
const HOST_VARIABLES: [&str; 18] = [
    "PBS_NODEFILE",
    "PBS_JOBID",
    "LSB_HOSTS",
    "LSB_DJOB_HOSTFILE",
    "LSB_MCPU_HOSTS",
    "LOADL_HOSTFILE",
    "COBALT_NODEFILE",
    "SGE_JOB_SPOOL_DIR",
    "PE_HOSTFILE",
    "HYDRA_HOST_FILE",
    "HYDRA_CONFIG_FILE",
    "OMPI_MCA_orte_rankfile",
    "OMPI_MCA_rmaps_rank_file_path",
    "OMPI_MCA_plm_rsh_agent",
    "OMPI_MCA_orte_default_hostfile",
    "OMPI_MCA_hostfile",
    "PRTE_MCA_prte_default_hostfile",
    "PRTE_MCA_hostfile",
];

/// Returns whether a launcher with these words starts all ranks on this host: no word, variable or
/// file names another. Words of the program behind those of the launcher can only prevent that.
pub(super) fn is_one_host(
    words: &[OsString],
    variable: impl Fn(&str) -> Option<String>,
    default_hostfile: Option<String>,
) -> bool {
    let names_hosts = |word: &OsString| {
        let word = word.to_string_lossy();
        let option = word.trim_start_matches('-');
        let name = option.split('=').next().unwrap_or_default();
        option.len() < word.len() && (HOST_OPTIONS.contains(&name) || option.contains("hostfile"))
    };
    let is_mca = |word: &OsString| {
        let word = word.to_string_lossy();
        ["hostfile", "plm_", "ras_"].iter().any(|part| word.contains(part))
    };
    // A job of Slurm's with one node has one host.
    let slurm = variable("SLURM_JOB_ID").or_else(|| variable("SLURM_NODELIST"));
    let has_nodes = slurm.is_some() && variable("SLURM_JOB_NUM_NODES").as_deref() != Some("1");
    let lists_hosts = default_hostfile.is_some_and(|text| {
        text.lines().any(|line| !line.trim().is_empty() && !line.trim_start().starts_with('#'))
    });
    !words.iter().any(|word| names_hosts(word) || is_mca(word))
        && !HOST_VARIABLES.iter().any(|name| variable(name).is_some_and(|value| !value.is_empty()))
        && !has_nodes
        && !lists_hosts
}

/// The text of the file from which an Open MPI takes hosts without an option, if there is one.
pub(super) fn default_hostfile(launcher: &Path) -> Option<String> {
    // A link to the launcher may lie elsewhere.
    let real = launcher.canonicalize().unwrap_or_else(|_| launcher.to_owned());
    let prefixes = [launcher, &real].map(|path| path.parent().and_then(Path::parent));
    let inside = ["etc/openmpi-default-hostfile", "etc/prte-default-hostfile"];
    let files: Vec<_> = prefixes
        .into_iter()
        .flatten()
        .flat_map(|prefix| inside.map(|file| prefix.join(file)))
        .collect();
    let system = ["/etc/openmpi/openmpi-default-hostfile", "/etc/prte-default-hostfile"];
    let all = files.into_iter().chain(system.map(Into::into));
    let texts: Vec<_> = all.filter_map(|file| std::fs::read_to_string(file).ok()).collect();
    (!texts.is_empty()).then(|| texts.join("\n"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(line: &str) -> Vec<OsString> {
        line.split_whitespace().map(OsString::from).collect()
    }

    #[test]
    fn without_a_word_of_hosts_there_is_one() {
        let none = |_: &str| None;
        for line in ["-n 4 ./a", "-np 2 --oversubscribe --bind-to none ./a -x 3", "./a"] {
            assert!(is_one_host(&words(line), none, None), "{line}");
        }
        let lines = [
            "-H one,two ./a",
            "--host one:2 ./a",
            "--hostfile hosts ./a",
            "--hostfile=hosts ./a",
            "-machinefile hosts ./a",
            "-f hosts -n 2 ./a",
            "-hosts one,two ./a",
            "--mca orte_default_hostfile hosts ./a",
            "--mca plm_rsh_agent ssh ./a",
            "-configfile job",
        ];
        for line in lines {
            assert!(!is_one_host(&words(line), none, None), "{line}");
        }
    }

    #[test]
    fn a_batch_system_or_a_file_may_have_more() {
        let line = words("-n 4 ./a");
        let given = |known: &'static [(&str, &str)]| {
            move |name: &str| {
                known.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned())
            }
        };
        assert!(!is_one_host(&line, given(&[("PBS_NODEFILE", "nodes")]), None));
        assert!(!is_one_host(&line, given(&[("HYDRA_CONFIG_FILE", "options")]), None));
        assert!(!is_one_host(&line, given(&[("SLURM_JOB_ID", "7")]), None));
        let nodes = &[("SLURM_JOB_ID", "7"), ("SLURM_JOB_NUM_NODES", "2")];
        assert!(!is_one_host(&line, given(nodes), None));
        let node = &[("SLURM_JOB_ID", "7"), ("SLURM_JOB_NUM_NODES", "1")];
        assert!(is_one_host(&line, given(node), None));
        assert!(is_one_host(&line, given(&[]), Some("# a comment\n\n".into())));
        assert!(!is_one_host(&line, given(&[]), Some("# a comment\nnode7\n".into())));
    }
}
