// Nothing: the served pages ask the server. An exported file has a module of this name with all its answers.
export default null;
